// Makes the shared library importable as compgen_fast._C; importing it registers every op below with the dispatcher.
#include <Python.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "C++ kernels of compgen_fast", -1, nullptr};
  return PyModule_Create(&module);
}
