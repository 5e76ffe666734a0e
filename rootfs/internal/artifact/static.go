package artifact

import (
	"debug/elf"
	"fmt"
)

// RequireStatic refuses an ELF program that needs a dynamic linker. What a guest starts from has none, and its
// kernel would panic for lack of a first program. A file that is not ELF passes.
func RequireStatic(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return nil //nolint:nilerr // whether it is a program at all is for others to say
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is linked dynamically, and the guest has no libraries when it starts: build it with CGO_ENABLED=0", path)
		}
	}
	return nil
}
