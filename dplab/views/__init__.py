"""Events folded into panels, panels drawn as figures; nothing here displays anything."""
