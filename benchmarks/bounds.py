def tables() -> str:
    return ""
