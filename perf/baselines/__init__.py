"""What people would use instead of TokenRouter, on the same engines, made as good as it can be."""
