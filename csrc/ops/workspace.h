// Memory that outlives a call: the activations of the caller and the scratch of every thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ktlinear::ops {

// Asks for 2-MiB pages on the whole ones inside [p, p + bytes): plain 4-KiB pages cost up to a quarter of the read
// bandwidth. A hint; nothing happens where the system has none.
void advise_huge_pages(void* p, int64_t bytes);

// Grows, never shrinks; 64-byte aligned, 2-MiB aligned on large pages from that size on. Growing forgets what it held.
class Buffer {
 public:
  constexpr Buffer() = default;
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer();
  void reserve(int64_t bytes);  // throws std::bad_alloc
  void* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Takes a thread's cached buffer for one call and gives it back. A nested call finds the cache empty and makes its own
// buffer, so that two calls on one thread never share memory.
class Lease {
 public:
  Lease(Buffer& home, int64_t bytes) : home_(home), buffer_(std::move(home)) { buffer_.reserve(bytes); }
  Lease(const Lease&) = delete;
  ~Lease() {
    if (buffer_.size() <= kKeepBytes) home_ = std::move(buffer_);
  }
  void* data() const { return buffer_.data(); }

 private:
  static constexpr int64_t kKeepBytes = int64_t{64} << 20;  // what a thread may hold on to between calls
  Buffer& home_;
  Buffer buffer_;
};

Buffer& activation_buffer();  // this thread's
Buffer& scratch_buffer();

}  // namespace ktlinear::ops
