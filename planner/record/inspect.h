#pragma once
// `poise inspect`: an order log as a table, or as JSON with one object a line. Prompts and answers are
// not shown. Writes to `out`; fails if the log cannot be read.

#include <cstdio>

#include "planner/record/balance.h"
#include "planner/record/log_digest.h"

namespace poise {

struct InspectOptions {
  std::filesystem::path log;
  bool json = false;
  bool brief = false;  // sums and requests in place of orders, with `json` (inspect_brief.h)
  bool check = false;  // whether every order holds, instead of the orders
  std::optional<std::uint64_t> iteration;
  std::optional<std::uint32_t> layer;
};

void inspect(const InspectOptions& options, std::FILE* out);

// One iteration, as the two forms show it; of `layer` alone where it is given.
std::string iteration_text(const LoggedIteration& iteration, const LogFacts& facts,
                           std::optional<std::uint32_t> layer);
std::string iteration_json(const LoggedIteration& iteration, const LogFacts& facts,
                           std::optional<std::uint32_t> layer);
// Whether the log has reports on the iteration's layers, if it was finished.
bool has_reports(const LoggedIteration& iteration);
// The balance of link and computation in an iteration.
// REQUIRES: the log has reports on it.
BalanceSums sums_of(const LoggedIteration& iteration, const LogFacts& facts);
std::string balance_json(const Balance& balance, const BalanceFacts& facts);
std::string configure_json(const messages::ConfigureT& configure, double time);
std::string policy_json(const messages::PolicyInForceT& policy, double time);
std::string ready_json(const messages::ReadyT& ready, double time);

}  // namespace poise
