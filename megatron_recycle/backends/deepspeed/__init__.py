"""DeepSpeed's pipeline engine under the plugin; the only modules that import DeepSpeed."""
