"""Mixture of Cache-Conditional Experts, arXiv 2412.00099."""
