"""Plug-ins for serving engines. Nothing else in the package imports them."""
