"""The compiled extension: typed jobs of raw pointers (integers; 0 is null). Only drq_fast/backends/native calls it.

csrc/search.h and csrc/levels.h document every member; the names here are theirs.
"""

compiler: str
amd: bool  # made by AMD
cuda: bool
max_levels: int  # kMaxLevels: levels up to which codes are scanned by bytes

class Lookup:
    def __init__(
        self, *, table: int, scale: int, codes: int, sums: int, Q: int, N: int, K: int, M: int, wide: bool
    ) -> None: ...

class Columns:
    """A codec as the search of the CPU takes it; columns: the codebook as `pack_codebook` lays it out."""
    def __init__(self, *, columns: int, scale: int, bases: int, offset: int, K: int, T: int, D: int) -> None: ...

class Database:
    """Codes that the CPU searches by queries, whose products with the codewords are part of the scan."""
    def __init__(
        self,
        *,
        codec: Columns,
        codes: int,
        norms: int,
        keep: int,
        N: int,
        M: int,
        stride: int,
        metric: int,
        wide: bool,
    ) -> None: ...

class Search:
    """Codes and the products of queries and codewords."""
    def __init__(
        self,
        *,
        table: int,
        constants: int,
        lengths: int,
        scale: int,
        bases: int,
        K: int,
        T: int,
        codes: int,
        norms: int,
        keep: int,
        scores: int,
        positions: int,
        Q: int,
        N: int,
        M: int,
        k: int,
        stride: int,
        metric: int,
        wide: bool,
    ) -> None: ...

class Refine:
    """Candidates of queries, to be scored by stored vectors."""
    def __init__(
        self,
        *,
        queries: int,
        candidates: int,
        vectors: int,
        steps: int,
        scores: int,
        positions: int,
        Q: int,
        n: int,
        k: int,
        D: int,
        metric: int,
        stored: int,
    ) -> None: ...

class Norms:
    def __init__(
        self,
        *,
        gram: int,
        scale: int,
        bases: int,
        inner: int,
        constants: int,
        starts: int,
        codes: int,
        norms: int,
        N: int,
        T: int,
        M: int,
        stride: int,
        wide: bool,
    ) -> None: ...

class Lists:
    """Inverted lists; columns: the centroids as `pack_codebook` lays them out."""
    def __init__(self, *, starts: int, columns: int, norms: int, products: int, L: int, probes: int) -> None: ...

class Probed:
    """The lists that each query looks at, for CUDA."""
    def __init__(self, *, starts: int, lists: int, ends: int, L: int, probes: int) -> None: ...

class Levels:
    """A codec in score space."""
    def __init__(
        self,
        *,
        codebook: int,
        gram: int,
        diagonal: int,
        bias: int,
        scale: int,
        bases: int,
        K: int,
        P: int,
        T: int,
        D: int,
        M: int,
        pitch: int,
    ) -> None: ...

class Tile:
    """Some vectors and their products with the codewords."""
    def __init__(self, *, levels: Levels, x: int, scores: int, N: int) -> None: ...

class Encode:
    def __init__(self, *, tile: Tile, omega: int, still_to_come: int, codes: int, beam: int, wide: bool) -> None: ...

class Beam:
    def __init__(
        self,
        *,
        encode: Encode,
        first: int,
        last: int,
        counts: int,
        shared: int,
        squares: int,
        residuals: int,
        errors: int,
        costs: int,
        codes: int,
        pitch: int,
    ) -> None: ...

class Training:
    """Attributes are the members of the struct in csrc/levels.h; those that are not given are 0."""
    def __init__(
        self, *, tile: Tile, gamma: float, codes: int, squared_norms: int, residuals: int, soft: int
    ) -> None: ...
    product: int
    kappa: int
    delta: int
    hard_errors: int
    soft_errors: int
    joint_errors: int
    omega: int
    of_hard: float
    of_soft: float
    of_joint: float
    gap: bool
    value: int
    dhard: int
    dsoft: int
    djoint: int
    ddelta: int
    dscores: int
    dsquared_norms: int
    dgram: int
    ddiagonal: int
    dscale: int

class Squared:
    """Attributes are the members of the struct in csrc/levels.h; those that are not given are 0."""
    def __init__(
        self, *, x: int, codebook: int, scale: int, offset: int, codes: int, N: int, D: int, K: int, M: int
    ) -> None: ...
    decoded: int
    errors: int
    derrors: int
    weights: int
    pulls: int
    dscale: int
    dcodebook: int

def lookup_cpu(job: Lookup, threads: int) -> None: ...
def lookup_cuda(job: Lookup, stream: int) -> None: ...
def packed_size(K: int, D: int) -> int: ...  # floats
def pack_codebook(codebook: int, columns: int, K: int, D: int) -> None: ...
def search_cpu(
    database: Database,
    query: int,
    scores: int,
    positions: int,
    Q: int,
    k: int,
    isa: str,
    threads: int,
    ceilings: int = 0,
) -> int: ...  # the first row of query that has NaN or infinity, else -1
def search_given_cpu(job: Search, isa: str, threads: int) -> None: ...
def search_lists_cpu(
    database: Database,
    lists: Lists,
    query: int,
    scores: int,
    positions: int,
    Q: int,
    k: int,
    isa: str,
    threads: int,
    ceilings: int = 0,
) -> int: ...  # as search_cpu
def search_given_lists_cpu(job: Search, lists: Lists, isa: str, threads: int) -> None: ...
def environment(name: str) -> str | None: ...
def norms_cpu(job: Norms, threads: int) -> None: ...
def refine_cpu(job: Refine, isa: str, threads: int) -> None: ...
def block_sums(data: int, bytes: int, keys: int, sums: int, threads: int) -> None: ...
def large_pages(memory: int, bytes: int) -> None: ...
def supported_isas() -> list[str]: ...
def encode_cpu(job: Encode, isa: str) -> None: ...
def beam_cpu(job: Beam, isa: str) -> None: ...
def assign_cpu(job: Training, isa: str) -> None: ...
def evaluate_cpu(job: Training, isa: str) -> None: ...
def mix_cpu(job: Training, isa: str) -> None: ...
def backward_cpu(job: Training, isa: str) -> None: ...
def decode_cpu(job: Squared, isa: str) -> None: ...
def squared_errors_cpu(job: Squared, isa: str) -> None: ...
def pulls_cpu(job: Squared, isa: str) -> None: ...
def own_pulls_cpu(job: Squared, isa: str) -> None: ...
def add_pulls_cpu(job: Squared, starts: int, places: int, begin: int, end: int, isa: str) -> None: ...
def group_codes(job: Squared, starts: int, places: int) -> None: ...
def search_cuda_workspace(job: Search, probed: Probed | None) -> int: ...
def search_cuda(job: Search, probed: Probed | None, workspace: int, stream: int) -> None: ...
def cuda_runtime_version() -> int: ...
def cuda_driver_version() -> int: ...
