"""Configuration of the two roles: Triton's config.pbtxt (as the dict that Triton hands over) and model.yaml.

Unknown keys are refused by name; values are resolved once into frozen objects with the unit in the name. Their defaults
hold wherever a value is left out: in these files, and in the YAML file that `tools.build_repository` reads.

`roles` says what a model is, `entry` and `subserver` what configures it, `parameters` how either reads its
config.pbtxt, `values` what a parameter's text may be, `model_yaml` what lies in its version folder.
"""
