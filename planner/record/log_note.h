#pragma once
// A message for the order log's reader only: it is not sent to an executor and has number 0.

#include <string>
#include <utility>

#include "common/messages_generated.h"
#include "common/order_log.h"

namespace poise {

void log_note(OrderLog& log, const std::string& run_id, messages::BodyUnion body);

template <typename Table>
void log_note(OrderLog& log, const std::string& run_id, Table&& table) {
  messages::BodyUnion body;
  body.Set(std::forward<Table>(table));
  log_note(log, run_id, std::move(body));
}

}  // namespace poise
