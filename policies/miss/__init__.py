"""What happens when a demanded expert is not resident."""
