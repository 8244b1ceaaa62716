"""The tensor data plane: owners store tensors as shards, consumers fetch them by handle."""
