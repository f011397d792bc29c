"""Plans a training before the TPU is rented: does it fit, how fast can it be, what does it cost?"""
