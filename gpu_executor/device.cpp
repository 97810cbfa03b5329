#include "gpu_executor/device.h"

#include <algorithm>

#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {

Bytes bytes_of(std::span<const Copy> copies) {
  Bytes sum{};
  for (const Copy& copy : copies) {
    sum += copy.bytes;
  }
  return sum;
}

Buffer Device::allocate(Bytes size, std::string_view what) {
  if (size.n == 0) {
    return {};
  }
  const Bytes taken = in_use_ + overhead();
  if (size > cap_ - taken) {
    fail("{} bytes of device memory for {} are beyond the cap: {} of {} bytes are in use", size.n,
         what, taken.n, cap_.n);
  }
  std::byte* data = fails_at("device.allocate") ? nullptr : take(size);
  if (data == nullptr) {
    fail("{} bytes of device memory for {} cannot be had: {} bytes are in use, {} would be allowed",
         size.n, what, taken.n, cap_.n);
  }
  in_use_ += size;
  peak_ = std::max(peak_, in_use_);
  return {*this, data, size};
}

void Device::launch(const HostAttention&) {
  check(false, "only a device with host threads attends on host cores");
}

HostBuffer Device::allocate_host(Bytes size) {
  if (size.n == 0) {
    return {};
  }
  std::byte* data = fails_at("device.allocate_host") ? nullptr : take_host(size);
  if (data == nullptr) {
    fail(Exit::interrupted, "{} bytes of host memory for tables cannot be had", size.n);
  }
  host_in_use_ += size;
  return {*this, data, size};
}

Registration Device::register_host(std::span<std::byte> memory, bool read_only) {
  failpoint("executor.registering");
  pin({&memory, 1}, read_only);
  return {*this, memory.data(), {static_cast<std::int64_t>(memory.size())}};
}

std::vector<Registration> Device::register_host(std::span<const std::span<std::byte>> parts,
                                                bool read_only) {
  failpoint("executor.registering");
  pin(parts, read_only);
  std::vector<Registration> registrations;
  for (const std::span<std::byte> part : parts) {
    registrations.emplace_back(*this, part.data(), Bytes{static_cast<std::int64_t>(part.size())});
  }
  return registrations;
}

void Device::end(std::vector<Registration> registrations) {
  std::vector<std::span<std::byte>> parts;
  for (Registration& one : registrations) {
    if (one.data() != nullptr) {
      parts.emplace_back(one.data(), static_cast<std::size_t>(one.size().n));
      one.forget();
    }
  }
  if (!parts.empty()) {
    unpin(parts);
  }
}

void Device::release(Memory kind, std::byte* data, Bytes size) {
  switch (kind) {
    case Memory::device:
      in_use_ -= size;
      return give(data, size);
    case Memory::host:
      host_in_use_ -= size;
      return give_host(data, size);
    case Memory::registered: {
      const std::span<std::byte> memory(data, static_cast<std::size_t>(size.n));
      return unpin({&memory, 1});
    }
  }
}

}  // namespace poise
