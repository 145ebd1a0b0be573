#pragma once

#include <cstdint>
#include <new>

namespace drq {
namespace DRQ_ISA {
namespace {

// Scratch memory, zeroed, on a cache line of its own.
template <class T>
struct Buffer {
  explicit Buffer(int64_t count) : data(new (std::align_val_t(64)) T[count]()) {}
  ~Buffer() { ::operator delete[](data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data;
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
