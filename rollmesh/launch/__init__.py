"""Starts the processes of a mesh, watches them, and leaves none behind.

It starts rooms by argv and knows them by what they report; it imports none of them.
"""
