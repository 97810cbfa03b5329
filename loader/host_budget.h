#pragma once
// How much host memory this run may take, and whether its weights and pool fit: decided before
// anything is loaded, in numbers a user can act on. Pure functions.

#include <optional>
#include <string>

#include "common/units.h"

namespace poise {

struct HostBudget {
  Bytes cap;                          // of weights and block pools together
  std::optional<Bytes> asked;         // --host-memory
  Bytes available;                    // when the loader started
  std::optional<std::string> notice;  // if more was asked for than is available
};

HostBudget host_budget(std::optional<Bytes> asked, Bytes available);

// Fails if the weights alone exceed the cap.
void check_weights_fit(Bytes weights, const HostBudget& budget);
// Why a pool of this size does not fit beside the weights; nothing if it fits.
std::optional<std::string> why_no_pool(Bytes pool, Bytes weights, const HostBudget& budget,
                                       Bytes available_now);

std::string gib_text(Bytes bytes);  // "24.5 GiB"; below 1 GiB "24.5 MiB"

}  // namespace poise
