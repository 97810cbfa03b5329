#pragma once
// What kind of a device an executor computes on. The executor says it (Hello.device_kind), a profile keeps
// it; nothing else reads it out of a device's name, which is for people.

#include <cstdint>
#include <optional>
#include <string_view>

namespace poise {

// cpu: cores of the host; its memory is the host's. cuda: a GPU.
enum class DeviceKind : std::uint8_t { cpu = 1, cuda = 2 };

// As --device names it.
constexpr std::string_view name_of(DeviceKind kind) {
  return kind == DeviceKind::cpu ? "cpu" : "cuda";
}
constexpr std::optional<DeviceKind> device_kind_from(std::string_view name) {
  return name == "cpu"    ? std::optional(DeviceKind::cpu)
         : name == "cuda" ? std::optional(DeviceKind::cuda)
                          : std::nullopt;
}

}  // namespace poise
