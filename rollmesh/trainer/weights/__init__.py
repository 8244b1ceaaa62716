"""A policy version on its way to engines: the folder it stands in, the publisher, its carriers."""
