"""What layers have instead of attention."""
