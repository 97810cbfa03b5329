#pragma once
// Machines that a user describes in a file, beside the named ones (cost_model.h). A description holds
// constants, which give the costs of any model. It may also hold the measured profile of one model,
// which then gives this model's costs. launch/README.md lists the fields. Reads and writes files;
// otherwise pure.

#include <filesystem>
#include <optional>
#include <string>

#include "planner/costs/cost_model.h"

namespace poise {

struct MachineDescription {
  Machine machine;
  std::optional<Profile> measured;
};

// Fails and names file, field and rule.
MachineDescription read_machine(const std::filesystem::path& path);
void write_machine(const std::filesystem::path& path, const MachineDescription& description);

// The machine on which this profile of the model was measured. Its constants are what the largest
// measured sizes reach.
MachineDescription machine_of(const Profile& measured, const ModelShape& shape, DType dtype,
                              KvFormat kv_format = KvFormat::plain);

// `machine` is one of the named machines, or else such a file. Fails if it is neither.
MachineDescription find_machine(const std::string& machine);
// What everything costs there: measured if the description holds a profile of this model in this
// dtype and format of KV blocks, else by its constants.
Profile costs_on(const std::string& machine, const ModelShape& shape, DType dtype,
                 KvFormat kv_format = KvFormat::plain);

}  // namespace poise
