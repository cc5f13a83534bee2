// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --isa avxvnni --threads 2
// 2024 lines, sha256 76477c382d3995ed2f0843d3d76449ac7258415169d216c32b3c165b441b245f
                %137:10 = scf.for %126 = %c0 to %c9 step %c1 iter_args(%127 = %116, %128 = %117, %129 = %118, %130 = %119, %131 = %120, %132 = %121, %133 = %122, %134 = %123, %135 = %124, %136 = %125) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %138 = arith.muli %126, %c7 : index
                  %139 = vector.load %2[%126, %105] : memref<2x16xf32>, vector<8xf32>
                  %140 = vector.load %3[%126, %105] : memref<2x16xf32>, vector<8xf32>
                  %141 = vector.load %2[%126, %107] : memref<2x16xf32>, vector<8xf32>
                  %142 = vector.load %3[%126, %107] : memref<2x16xf32>, vector<8xf32>
                  %143 = arith.addi %104, %c1 : index
                  %144 = arith.addi %104, %c9 : index
                  %145 = arith.addi %104, %c15 : index
                  %146 = arith.addi %104, %c4 : index
                  %147 = arith.divui %19, %c10 : index
                  %148 = arith.addi %147, %126 : index
                  %149 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %150 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %151 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %152 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %153 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %154 = arith.muli %148, %c22 : index
                  %155 = vector.load %1[%138, %105] : memref<16x16xi32>, vector<8xi32>
                  %156 = vector.load %1[%138, %107] : memref<16x16xi32>, vector<8xi32>
                  %157 = vector.bitcast %155 : vector<8xi32> to vector<32xi8>
                  %158 = vector.bitcast %156 : vector<8xi32> to vector<32xi8>
                  %159 = memref.load %m0[%104, %154] : memref<9x48xi32>
                  %160 = vector.broadcast %159 : i32 to vector<8xi32>
                  %161 = vector.bitcast %160 : vector<8xi32> to vector<32xi8>
                  %162 = llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"(%149, %157, %161) : (vector<8xi32>, vector<32xi8>, vector<32xi8>) -> vector<8xi32>
                  %163 = llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"(%149, %158, %161) : (vector<8xi32>, vector<32xi8>, vector<32xi8>) -> vector<8xi32>
                  %164 = memref.load %m0[%143, %154] : memref<9x48xi32>
                  %165 = vector.broadcast %164 : i32 to vector<8xi32>
                  %166 = vector.bitcast %165 : vector<8xi32> to vector<32xi8>
                  %167 = llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"(%150, %157, %166) : (vector<8xi32>, vector<32xi8>, vector<32xi8>) -> vector<8xi32>
                  %168 = llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"(%150, %158, %166) : (vector<8xi32>, vector<32xi8>, vector<32xi8>) -> vector<8xi32>
                  %169 = memref.load %m0[%144, %154] : memref<9x48xi32>
                  %170 = vector.broadcast %169 : i32 to vector<8xi32>
                  %171 = vector.bitcast %170 : vector<8xi32> to vector<32xi8>
                  %172 = llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"(%151, %157, %171) : (vector<8xi32>, vector<32xi8>, vector<32xi8>) -> vector<8xi32>
                  %173 = llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"(%151, %158, %171) : (vector<8xi32>, vector<32xi8>, vector<32xi8>) -> vector<8xi32>
                  %174 = memref.load %m0[%145, %154] : memref<9x48xi32>
                  %175 = vector.broadcast %174 : i32 to vector<8xi32>
                  %176 = vector.bitcast %175 : vector<8xi32> to vector<32xi8>
// 922 lines more
                  %1099 = vector.broadcast %1098 : f32 to vector<8xf32>
                  %1100 = math.fma %1097, %1099, %135 : vector<8xf32>
                  %1101 = memref.load %m2[%146, %148] : memref<9x2xf32>
                  %1102 = vector.broadcast %1101 : f32 to vector<8xf32>
                  %1103 = math.fma %140, %1102, %1100 : vector<8xf32>
                  %1104 = arith.mulf %1031, %141 : vector<8xf32>
                  %1105 = llvm.call_intrinsic "llvm.arithmetic.fence"(%1104) : (vector<8xf32>) -> vector<8xf32>
                  %1106 = memref.load %m1[%146, %148] : memref<9x2xf32>
                  %1107 = vector.broadcast %1106 : f32 to vector<8xf32>
                  %1108 = math.fma %1105, %1107, %136 : vector<8xf32>
                  %1109 = memref.load %m2[%146, %148] : memref<9x2xf32>
                  %1110 = vector.broadcast %1109 : f32 to vector<8xf32>
                  %1111 = math.fma %142, %1110, %1108 : vector<8xf32>
                  scf.yield %1039, %1047, %1055, %1063, %1071, %1079, %1087, %1095, %1103, %1111 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }
