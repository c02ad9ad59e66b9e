"""Conversations -> tokens and loss mask -> hidden states -> training samples."""
