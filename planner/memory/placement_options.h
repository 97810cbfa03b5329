#pragma once
// Where a user wants weights and context, whatever the policy would choose: so that the papers' systems
// can be run as they are. Options in, what a plan may not change out. Pure.

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "planner/policies/policy.h"

namespace poise {

// --percent, FlexGen's: per cent of the weights on the device and on the host, of the context there and
// there, and of the activations between layers.
using FlexGenPercent = std::array<double, 6>;
// "W,W,C,C,A,A". Fails, naming the remedy, where it is not that or asks for what is not kept so: a pair
// that leaves something to a disk, or activations between layers on the host.
FlexGenPercent parse_percent(const std::string& text);

// --gpu-blocks: of the kinds of context blocks, those that the device may keep.
enum class GpuBlocks { all, act, none };
GpuBlocks parse_gpu_blocks(const std::string& text);

struct PlacementOptions {
  std::optional<std::int32_t> resident_layers;
  std::optional<FlexGenPercent> percent;
  std::optional<GpuBlocks> gpu_blocks;

  // Fails where one option says what another says already.
  void check_alone() const;
  // Adds the wishes to what stands already, which goes before them. Fails, with the remedy, where the
  // model has fewer layers or the device keeps no context (`holds_blocks`).
  void add_to(FixedPlacement& fixed, std::int32_t layers, bool holds_blocks) const;
};

}  // namespace poise
