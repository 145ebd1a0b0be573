"""The compiled extension. Pointers are integers; only `_native.py` calls it."""

compiler: str
cuda: bool

def lookup_cpu(
    table: int, scale: int, codes: int, wide: bool, sums: int, Q: int, N: int, K: int, M: int, threads: int
) -> None: ...
def lookup_cuda(
    table: int, scale: int, codes: int, wide: bool, sums: int, Q: int, N: int, K: int, M: int, stream: int
) -> None: ...
def supported_isas() -> list[str]: ...
def encode_cpu(
    scores: int,
    squared_norms: int,
    x: int,
    codebook: int,
    gram: int,
    bias: int,
    scale: int,
    omega: int,
    still_to_come: int,
    codes: int,
    wide: bool,
    N: int,
    K: int,
    P: int,
    D: int,
    M: int,
    beam: int,
    isa: str,
    threads: int,
) -> None: ...
def cuda_runtime_version() -> int: ...
def cuda_driver_version() -> int: ...
