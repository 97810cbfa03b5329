#pragma once
// nlohmann's JSON. Its classes are compiled once, in json.cpp, and not in each source that uses them.

#include <nlohmann/json.hpp>

#ifndef POISE_INSTANTIATED  // tests/support/precompiled.h
extern template class nlohmann::basic_json<>;
extern template class nlohmann::basic_json<nlohmann::ordered_map>;
#endif
