"""What formats share: words, groups, cuts, block scales, configs' modules."""
