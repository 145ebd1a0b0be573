// DRQ_COUNT(scan, codes) adds to the codes that a scan has processed, so that tests notice a scan that never runs. It
// is empty unless DRQ_COUNT_SCANS is defined.
#pragma once

#ifdef DRQ_COUNT_SCANS
#include <atomic>
#include <cstdint>

namespace drq {

struct Counts {
  std::atomic<int64_t> floats{0}, batch{0}, one{0}, bits{0}, few{0};
};
extern Counts counts;

}  // namespace drq

#define DRQ_COUNT(scan, codes) drq::counts.scan += (codes)
#else
#define DRQ_COUNT(scan, codes) static_cast<void>(0)
#endif
