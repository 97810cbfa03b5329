#pragma once
// A simulation's result as text.

#include <string>

#include "common/files/json.h"

namespace poise {

// {"rows": [{name: text or number, …}, …], "notes": [text, …]}: a line of names, a line for each row with
// columns as wide as their contents, then the notes, which are optional. REQUIRES: a row, and
// the same names in all.
std::string to_table(const nlohmann::ordered_json& played);

}  // namespace poise
