// Searches some of 12,288 random codes by one instruction set and one thread, so that its instructions can be counted.
// Usage: scan ISA METRIC QUERIES LEVELS CODES.
#include <cmath>
#include <string>

#include "isa.h"
#include "random.h"
#include "search.h"

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const auto number = [argv](int i) { return std::strtoll(argv[i], nullptr, 10); };
  const int metric = static_cast<int>(number(2));
  const int64_t Q = number(3), M = number(4), N = 12288, K = 256, k = 1;
  int isa = 0;
  while (isa < drq::kIsaCount && std::string(argv[1]) != drq::kIsaNames[isa]) ++isa;
  if (!drq::isa_supported(isa)) return 3;

  Random random(1);
  std::vector<float> table(Q * K), scale(M), norms(N), constants(Q), scores(Q * k);
  std::vector<uint8_t> codes(N * M);
  std::vector<int64_t> positions(Q * k), bases(M);
  for (auto& x : table) x = random.normal();
  for (auto& code : codes) code = static_cast<uint8_t>(random.below(K));
  for (auto& norm : norms) norm = 1 + random.uniform();
  for (int64_t m = 0; m < M; ++m) scale[m] = std::pow(0.5f, static_cast<float>(m));
  drq::Search job{};
  job.table = table.data(), job.scale = scale.data(), job.bases = bases.data(), job.codes = codes.data();
  job.norms = metric == drq::kIp ? nullptr : norms.data(), job.constants = constants.data();
  job.scores = scores.data(), job.positions = positions.data();
  job.Q = Q, job.N = number(5), job.K = job.T = K, job.M = M, job.k = k, job.stride = M, job.metric = metric;
  drq::search_cpu(job, {}, isa, 1);
  std::printf("%lld %.9g\n", static_cast<long long>(positions[0]), static_cast<double>(scores[0]));
  return 0;
}
