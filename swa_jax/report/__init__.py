"""Pictures, and every table that a terminal shows. They take plain numbers; nothing here measures anything.

Every picture is a PNG file, written whole or not at all, without a display; some also go into a page, as SVG. `style`
is the one style of all of them.
"""
