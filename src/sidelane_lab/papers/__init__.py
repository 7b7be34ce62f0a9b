"""The papers that Sidelane rests on: their claims, and their figures drawn from predictions."""
