#pragma once
// What a simulation played, as text.

#include <nlohmann/json.hpp>
#include <string>

namespace poise {

// {"rows": [{name: text or number, …}, …], "notes": [text, …]}: a line of names, a line for each row with
// columns as wide as what stands in them, then the notes, which may be left out. REQUIRES: a row, and
// the same names in all.
std::string to_table(const nlohmann::ordered_json& played);

}  // namespace poise
