"""What grammars cost: their compilation, their masks, and the steps that wait for them."""
