"""Coordinator: connects a pipeline's engines with the scheduler of a shared fleet.

- Acts by leased requests to the pipeline's fleet table and by calls to the engines.
- PipelineHooks is the interface by which rollouts and trainers request GPUs.
"""
