"""One op a file or folder, its public function first; `vapo_kernels` itself hands them on."""
