#include "common/files/json.h"

#ifndef POISE_INSTANTIATED
template class nlohmann::basic_json<>;
template class nlohmann::basic_json<nlohmann::ordered_map>;
#endif
