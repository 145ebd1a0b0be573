// Numbers from a seed, the same with every compiler and library, and a loop over seeds.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "isa.h"

// splitmix64
struct Random {
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u) {}
  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t end) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(end)); }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool once_in(int64_t times) { return below(times) == 0; }
  float uniform() { return static_cast<float>(bits() >> 40) / (1 << 24); }
  // Bell-shaped, mean 0 and variance 1.
  float normal() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  int64_t one_of(std::initializer_list<int64_t> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  uint64_t state;
};

inline float odd_value(Random& random) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 0, -0.0f, 3e38f, 1e-40f};
  return values[random.below(7)];
}

// Runs check(seed) for argv[1] (first seed, 0) and argv[2] (how many, 100): false is a failure that it has printed.
template <class Check>
int run_seeds(int argc, char** argv, const Check& check) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 100;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));  // before anything can end the program
    if (!check(seed)) return 1;
  }
  std::printf("%llu cases by", static_cast<unsigned long long>(count));
  for (int isa = 0; isa < drq::kIsaCount; ++isa)
    if (drq::isa_supported(isa)) std::printf(" %s", drq::kIsaNames[isa]);
  std::printf("\n");
  return 0;
}
