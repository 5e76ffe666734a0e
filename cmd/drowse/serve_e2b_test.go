//go:build linux

package main

import (
	"errors"
	"testing"
)

func TestE2BFlags_that_do_not_fit_together_are_errors_of_usage(t *testing.T) {
	const at = "127.0.0.1:0"
	for name, c := range map[string]struct {
		f  e2bFlags
		ok bool
	}{
		"none":                  {e2bFlags{}, true},
		"an address":            {e2bFlags{listen: at}, true},
		"all":                   {e2bFlags{listen: at, domain: "d.test", cert: "c", key: "k", templates: []string{"base=a:b=c"}}, true},
		"a domain alone":        {e2bFlags{domain: "d.test"}, false},
		"templates alone":       {e2bFlags{templates: []string{"a=b"}}, false},
		"a key alone":           {e2bFlags{listen: at, key: "k"}, false},
		"TLS and none":          {e2bFlags{listen: at, cert: "c", key: "k", plain: true}, false},
		"a template of nothing": {e2bFlags{listen: at, templates: []string{"base="}}, false},
		"a template no name":    {e2bFlags{listen: at, templates: []string{"=a"}}, false},
	} {
		err := c.f.check()
		if usage := (usageError{}); (err == nil) != c.ok || err != nil && !errors.As(err, &usage) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
