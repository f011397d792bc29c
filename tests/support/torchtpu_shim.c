// TorchTPU over XLA's CPU plugin, for tests on machines without a TPU.
//
// torch_tpu loads the PJRT plugin named by TPU_LIBRARY_PATH. The CPU plugin has the same C API, but rejects the options
// with which torch_tpu creates its client. This library forwards all calls to the plugin named by PJRT_CPU_PLUGIN,
// without those options. torchtpu_check.sh builds it.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

static const PJRT_Api* plugin;
static PJRT_Api* api;

static PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  PJRT_Client_Create_Args without = *args;
  without.create_options = NULL;
  without.num_options = 0;
  PJRT_Error* error = plugin->PJRT_Client_Create(&without);
  args->client = without.client;
  return error;
}

const PJRT_Api* GetPjrtApi(void) {
  if (api) return api;
  const char* path = getenv("PJRT_CPU_PLUGIN");
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!library) {
    fprintf(stderr, "PJRT_CPU_PLUGIN=%s cannot be loaded: %s\n", path ? path : "", path ? dlerror() : "it is not set");
    abort();
  }
  plugin = ((const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi"))();
  api = malloc(plugin->struct_size);
  memcpy(api, plugin, plugin->struct_size);
  api->PJRT_Client_Create = create_client;
  return api;
}
