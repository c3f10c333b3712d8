"""The tensor ring: one step on a device. Imports torch; knows no vendor and no plugin by name."""
