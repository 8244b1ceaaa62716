"""What a gateway's sessions have done, on disk, so that they outlive it.

Owns the journal's entries, who writes them and how a book is made again of them. The journal's own
format is core/journal.py's.
"""
