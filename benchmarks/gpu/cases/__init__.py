"""What the card computes, case by case, against float64."""
