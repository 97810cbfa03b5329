#pragma once
// How much host memory this run may take, and whether what it wants fits: decided before anything
// is loaded, in numbers a user can act on. Pure functions.

#include <optional>
#include <string>

#include "common/units.h"

namespace poise {

struct HostBudget {
  Bytes cap;                          // of weights and block pools together
  std::optional<Bytes> asked;         // --host-memory
  Bytes available;                    // when the loader started
  std::optional<std::string> notice;  // where more was asked for than there is
};

HostBudget host_budget(std::optional<Bytes> asked, Bytes available);

// Fails where the weights alone pass the cap.
void check_weights_fit(Bytes weights, const HostBudget& budget);
// Why a pool of this size cannot be had beside the weights; nothing where it can.
std::optional<std::string> why_no_pool(Bytes pool, Bytes weights, const HostBudget& budget,
                                       Bytes available_now);

std::string gib_text(Bytes bytes);  // "24.5 GiB"; below 1 GiB "24.5 MiB"

}  // namespace poise
