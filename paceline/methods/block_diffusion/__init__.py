"""What drafters of a block share: DFlash and DSpark, whose block is DFlash's."""
