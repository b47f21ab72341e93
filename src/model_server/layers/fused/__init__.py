"""Element-wise operations between matrix products, each as one operator."""
