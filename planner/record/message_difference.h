#pragma once
// The first field in which two messages differ, found by the schema itself (common/messages.fbs, in its
// binary form), so a field that is added there is compared from then on.

#include <flatbuffers/reflection.h>

#include <optional>
#include <string>
#include <vector>

#include "common/messages_generated.h"

namespace poise {

struct FieldDifference {
  std::string path;  // "mini_batches[1].loads[4].first_slot"
  std::string a, b;  // its values, in words
};

// Two runs of the same work on the same device agree in `work`. `everything` adds what differs between
// them all the same: names of runs and processes, numbers of messages and pools, clocks, measured times.
enum class Compared { work, everything };

class MessageComparison {
 public:
  explicit MessageComparison(Compared compared);

  // Of two verified messages; nothing if they agree.
  std::optional<FieldDifference> first_difference(const messages::Message& a,
                                                  const messages::Message& b) const;

 private:
  struct Walk;
  using Fields = std::vector<const reflection::Field*>;  // that are compared, as they are numbered

  const reflection::Schema* schema_;
  std::vector<Fields> fields_;  // by object
};

}  // namespace poise
