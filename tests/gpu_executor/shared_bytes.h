#pragma once
// Zeros in a shared mapping, as weights and pools of a run are: a registration that ends takes a mapping's pages from the
// process's tables (Device::register_host), and what a private mapping holds would be lost with them.

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <system_error>

namespace poise::test {

class SharedBytes {
 public:
  explicit SharedBytes(std::size_t size)
      : size_(size),
        data_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "mapping memory for a test");
    }
  }
  explicit SharedBytes(std::span<const std::byte> bytes) : SharedBytes(bytes.size()) {
    std::memcpy(data_, bytes.data(), size_);
  }
  ~SharedBytes() { munmap(data_, size_); }
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::span<std::byte> all() const { return {data(), size_}; }

 private:
  const std::size_t size_;
  void* const data_;
};

}  // namespace poise::test
