package state

import (
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// FindService returns the index of a service, or -1.
func FindService(list []spec.Service, name string) int {
	return slices.IndexFunc(list, func(s spec.Service) bool { return s.Name == name })
}

// NoService returns the error that a VM has no service of that name.
func NoService(vm, name string) error {
	return fmt.Errorf("%w: %s has no service %q: see Sandbox(%q).Services", spec.ErrNotFound, vm, name, vm)
}

// SetService adds a service, or replaces the one of its name.
func (r *Record) SetService(want spec.Service) error {
	list := slices.Clone(r.Spec.Services)
	if i := FindService(list, want.Name); i >= 0 {
		list[i] = want
	} else {
		list = append(list, want)
	}
	if err := spec.ValidateServices(list); err != nil {
		return err
	}
	r.Spec.Services = list
	return nil
}

// DropService removes a service.
func (r *Record) DropService(name string) error {
	i := FindService(r.Spec.Services, name)
	if i < 0 {
		return NoService(r.Spec.Name, name)
	}
	r.Spec.Services = slices.Delete(slices.Clone(r.Spec.Services), i, i+1)
	return nil
}
