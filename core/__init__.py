"""The frame: request core, scheduler, contracts and plugin resolution. Imports no plugin."""
