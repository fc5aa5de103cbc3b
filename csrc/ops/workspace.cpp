#include "workspace.h"

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ktlinear::ops {

namespace {
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kCacheLine = 64;

constexpr int64_t alignment_of(int64_t bytes) { return bytes >= kHugePage ? kHugePage : kCacheLine; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
}  // namespace

void advise_huge_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p));
  const int64_t begin = round_up(address, kHugePage);
  const int64_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(static_cast<char*>(p) + (begin - address), static_cast<size_t>(end - begin), MADV_HUGEPAGE);
#endif
}

Buffer::~Buffer() {
  if (data_ != nullptr) ::operator delete(data_, static_cast<std::align_val_t>(alignment_of(size_)));
}

void Buffer::reserve(int64_t bytes) {
  if (bytes <= size_) return;
  Buffer grown;
  // By at least a half, so that a slowly growing sequence does not allocate on every call.
  grown.size_ = bytes > size_ + size_ / 2 ? bytes : size_ + size_ / 2;
  grown.size_ = round_up(grown.size_, alignment_of(grown.size_));
  const auto alignment = static_cast<std::align_val_t>(alignment_of(grown.size_));
  grown.data_ = ::operator new(static_cast<size_t>(grown.size_), alignment);
  if (grown.size_ >= kHugePage) advise_huge_pages(grown.data_, grown.size_);
  *this = std::move(grown);
}

Buffer& activation_buffer() {
  thread_local Buffer buffer;
  return buffer;
}

Buffer& scratch_buffer() {
  thread_local Buffer buffer;
  return buffer;
}

}  // namespace ktlinear::ops
