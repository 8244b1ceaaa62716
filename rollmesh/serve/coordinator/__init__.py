"""The coordinator: between a pipeline's engines and the scheduler of the fleet that they share.

It acts by leased asks to the pipeline's fleet table and by calls to the engines; the hooks, through
which rollouts and trainers ask for GPUs, stand beside it.
"""
