#include "loader/host_budget.h"

#include <algorithm>

#include "common/trouble.h"

namespace poise {
namespace {

std::string limit_text(const HostBudget& budget) {
  if (budget.asked && *budget.asked <= budget.available) {
    return fmt::format("--host-memory allows {}", gib_text(budget.cap));
  }
  return fmt::format(
      "this machine has {} available (the least of free memory, /dev/shm and control "
      "group)",
      gib_text(budget.cap));
}

}  // namespace

std::string gib_text(Bytes bytes) {
  const bool large = bytes >= kGiB;
  return fmt::format("{:.1f} {}",
                     static_cast<double>(bytes.n) / static_cast<double>((large ? kGiB : kMiB).n),
                     large ? "GiB" : "MiB");
}

HostBudget host_budget(std::optional<Bytes> asked, Bytes available) {
  if (asked && asked->n <= 0) {
    fail("--host-memory must be more than 0 bytes, not {}", asked->n);
  }
  HostBudget budget{.cap = std::min(asked.value_or(available), available),
                    .asked = asked,
                    .available = available};
  if (asked && *asked > available) {
    budget.notice = fmt::format(
        "--host-memory {} is more than the {} this machine has available; "
        "that is the limit then",
        gib_text(*asked), gib_text(available));
  }
  return budget;
}

void check_weights_fit(Bytes weights, const HostBudget& budget) {
  if (weights > budget.cap) {
    fail("the weights take {} of host memory, but {}: free some, or keep them in a smaller --dtype",
         gib_text(weights), limit_text(budget));
  }
}

std::optional<std::string> why_no_pool(Bytes pool, Bytes weights, const HostBudget& budget,
                                       Bytes available_now) {
  if (pool > budget.cap - weights) {
    return fmt::format("a block pool of {} beside {} of weights is too much: {}", gib_text(pool),
                       gib_text(weights), limit_text(budget));
  }
  if (pool > available_now) {
    return fmt::format("a block pool of {} does not fit into the {} of memory that are available",
                       gib_text(pool), gib_text(available_now));
  }
  return std::nullopt;
}

}  // namespace poise
