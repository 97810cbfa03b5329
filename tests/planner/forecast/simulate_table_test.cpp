#include "planner/forecast/simulate_table.h"

#include <gtest/gtest.h>

namespace poise {
namespace {

using TableJson = nlohmann::ordered_json;

TEST(SimulationTable, ColumnsAreAsWideAsWhatStandsInThem) {
  const TableJson row{{"model", "opt-6.7b, 8 of 32 keys"},
                      {"machine", "rtx4090-pcie4"},
                      {"all", true},
                      {"speed", 2.0 / 3}};
  const TableJson narrow{{"model", "opt-30b"}, {"machine", "l4"}, {"all", false}, {"speed", 12.0}};
  EXPECT_EQ(to_table({{"rows", TableJson::array({row, narrow})},
                      {"notes", TableJson::array({"a note"})}}),
            "model                   machine        all            speed\n"
            "opt-6.7b, 8 of 32 keys  rtx4090-pcie4  true           0.67\n"
            "opt-30b                 l4             false          12.00\n"
            "a note\n");
}

TEST(SimulationTable, NeedsNoNotes) {
  EXPECT_EQ(to_table({{"rows", TableJson::array({TableJson{{"n", 1}}})}}), "n\n1\n");
}

}  // namespace
}  // namespace poise
